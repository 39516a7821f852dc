"""What moves KV: connectors, the ledger, transports, references, handshakes."""
