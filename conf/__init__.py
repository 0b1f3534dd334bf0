"""The Hydra groups of ``memwall-train``, as a package: ``pkg://memwall_strategy.conf`` finds them once installed."""
