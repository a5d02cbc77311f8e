"""The vLLM engine: the real vLLM as a child of ours, headstart's connector under it, our server in front."""

from headstart.engine.vllm.opening import open_engine

__all__ = ["open_engine"]
