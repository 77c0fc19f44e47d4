"""What an adapter of a port must do, as plain coroutines with sentence names: one module per port, no test runner."""
