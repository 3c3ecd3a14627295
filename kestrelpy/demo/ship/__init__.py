"""The demo of shipping: machines that burn, one after another, and a proof of what is left. ``make demo-ship``."""
