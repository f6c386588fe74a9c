"""Commands of edgepipe that the node runs for the page and the command line."""
