"""What holds and moves: chunks, pools, devices, the NVMe store, transfers."""
