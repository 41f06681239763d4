"""The service, asked over HTTP in its own process."""
