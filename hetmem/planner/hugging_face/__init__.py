"""Hugging Face models from a configuration file alone: without weights, network, or code beside transformers'."""
