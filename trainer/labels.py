"""The mark of a label that no loss counts: the data sets it, the loss leaves it out."""

UNCOUNTED = -100  # torch.nn.functional.cross_entropy's own convention
