"""Sampled softmax for PyTorch whose cost grows with log n."""
