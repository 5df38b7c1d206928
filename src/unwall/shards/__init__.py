"""What a parameter is: layout, group, its states and transitions, collectives, building groups from a module."""
