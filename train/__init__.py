"""The training application, run from the checkout."""
