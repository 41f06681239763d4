"""Tests of `glassblock_client`; `fake_service` answers in the service's place."""
