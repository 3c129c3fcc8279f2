"""The dashboard: `streamlit run dashboard/app.py`. It reads result files; it never runs a kernel."""
