"""graft-dist: speculative decoding with draft trees that learns, from its own rounds, which edges to trust.

Importing the package does nothing but name its version; take what you need from its modules.
"""

__version__ = "0.1.0"
