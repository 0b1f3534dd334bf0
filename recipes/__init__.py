"""Ready-made trainings: data, models and the figures they reproduce.

In an installed package this is ``memwall_strategy.recipes``. Modules here import each other relatively, so they work
under either name.
"""
