"""A tool for search.yaml: it asks a server as Search-R1's retrieval server is asked."""

import os

import httpx

URL = os.environ.get("SEARCH_URL", "http://localhost:8000/retrieve")


async def search(query: str) -> str:
    """Searches an encyclopedia; returns the three passages that fit best."""
    asked = {"queries": [query], "topk": 3, "return_scores": True}
    async with httpx.AsyncClient(timeout=30) as client:
        answer = (await client.post(URL, json=asked)).raise_for_status().json()
    return "\n\n".join(found["document"]["contents"] for found in answer["result"][0])
