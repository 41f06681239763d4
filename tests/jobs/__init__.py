"""Jobs over both databases."""
