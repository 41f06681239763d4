"""Tests on the weights of SmolLM2-135M, which the fixture `smollm2` fetches."""
