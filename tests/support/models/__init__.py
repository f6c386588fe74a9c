"""Model folders, GGUF files and single weights of every family and stored format, tiny and with seeded values, made
while a test runs. ``files`` has the plain ones and raw bytes whose every part can be wrong, ``bad`` whole models with
one fault each, ``fake_hub`` a hub on loopback that offers them. Use these wherever a test needs a file or a weight;
no test keeps a model in git.
"""
