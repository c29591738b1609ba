"""What a run needs before it is run: bytes, FLOPs and the speeds they allow."""
