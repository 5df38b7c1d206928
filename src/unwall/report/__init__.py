"""Pictures and traces of what a sharded model did."""
