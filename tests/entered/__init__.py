"""Which files of src each test enters, in this process and in all that it starts."""
