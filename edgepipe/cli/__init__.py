"""The command line: one module per verb. A verb parses, calls and prints, and does heavy imports when it runs."""
