"""hasten takes a PyTorch language model to the limit of the machine it runs on."""
