"""Offloads what autograd saves for backward to host memory and NVMe, and fetches it back as nodes unpack it."""
