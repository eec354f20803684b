"""Llama-family models: their configuration, weights and forward pass."""

from minispec.model.config import ModelConfig
from minispec.model.llama import Llama
from minispec.model.loader import check_folder

__all__ = ["Llama", "ModelConfig", "check_folder"]
