"""Hostile but valid requests of one user, and a bystander whose waits are measured."""
