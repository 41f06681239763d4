"""Tests of `glassblock.numerics`; `makers` builds what they share."""
