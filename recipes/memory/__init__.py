"""What paging the optimizer's state costs, and how much device memory a rank is left with: claimed beside measured."""
