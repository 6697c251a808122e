"""The model on a device: weights, forward pass over hybrid batches, sampling. No scheduling decisions."""
