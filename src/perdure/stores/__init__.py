"""Where logs and ledgers are kept. Each store meets the ports and passes ``perdure.testing.conformance``."""
