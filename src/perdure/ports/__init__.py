"""What a store, a provider or a watcher must do: Protocols whose docstrings are the contract. No implementation."""
