"""What runs on a cluster or on a command line: collection, training, and the `graft` command. May import everything."""
