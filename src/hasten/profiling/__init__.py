"""`hasten profile`: where the time and the memory of training, generating and serving go, and what could be gained."""
