"""Requests about users, access control lists and sign-in."""
