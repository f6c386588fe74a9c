"""One hop: channels, frames, credits, deadlines."""
