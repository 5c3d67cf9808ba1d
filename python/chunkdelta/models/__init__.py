"""Adapters: models as the prefill loop and the memory plan see them."""
