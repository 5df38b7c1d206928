"""What connects a model to the schedule: hooks, scopes of calls, whole tensors in and out, building without memory."""
