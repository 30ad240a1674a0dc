"""What training reads: captioned images, the tokenizer, the DataLoader, and the shared memory its
workers need.
"""
