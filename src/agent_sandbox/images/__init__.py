"""Where root file systems come from: the host itself, a directory, or a tar."""

from agent_sandbox.images.store import ImageInfo, ImageRoot, ImageStore

__all__ = ["ImageInfo", "ImageRoot", "ImageStore"]
