"""Plumbing that every server needs beside the contract.

access    API keys of tenants, and their limits
logs      log lines for people and for machines
serving   the settings that servers share
tls       certificates, and channels and ports that use them
"""
