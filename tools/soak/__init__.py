"""Long runs that try to break a store; `make soak` runs them, the tests run short forms of them."""
