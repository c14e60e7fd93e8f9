"""What a hard cap on every answer costs against spending the same on average."""
