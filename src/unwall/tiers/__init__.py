"""Where bytes live: device, host and disk behind one small protocol, and copies between any two of them."""
