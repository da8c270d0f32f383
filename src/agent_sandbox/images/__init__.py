"""Where root file systems come from: the host itself, a directory, a tar, a packed image, or a registry."""

from agent_sandbox.images.image_config import ImageConfig
from agent_sandbox.images.kinds import KINDS, Kind, Source, find_source
from agent_sandbox.images.store import ImageInfo, ImageRoot, ImageStore

__all__ = ["KINDS", "ImageConfig", "ImageInfo", "ImageRoot", "ImageStore", "Kind", "Source", "find_source"]
