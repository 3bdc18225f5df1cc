"""Brings parameters to their homes: as a module is built or managed, and later to and from idle device memory."""
