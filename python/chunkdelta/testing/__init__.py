"""What the test suite and users' own tests share: error measures, textbook forms, strategies."""
