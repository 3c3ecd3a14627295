"""Shipping: is what is in the store what was put, and is nothing else believed?"""
