"""Carries a target model's hidden states to the trainer of its speculative-decoding drafter."""

__version__ = "0.1.0"
