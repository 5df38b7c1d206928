"""The step on each tier, gradient norm and clipping, loss scaling, and the torch.optim face."""
