"""The Ray Serve application: an OpenAI-compatible endpoint over one engine per replica. Empty so far."""
