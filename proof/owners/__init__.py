"""Operations whose owners are killed, and whose living owner loses its connections, while another process retries.

python -m proof.owners
"""
