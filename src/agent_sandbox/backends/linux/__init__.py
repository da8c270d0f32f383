"""What backends on this Linux host share: disks, mounts, overlays, control groups, processes and their errors."""
