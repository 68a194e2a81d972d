#!/usr/bin/env python3
"""Puts a verb before doc comments of functions that begin with a question word.

usage: docfix.py --tree ROOT [--write]
`/// Whether x` above a `fn` that returns something becomes `/// Returns whether x`; likewise Which, How,
Where, When, Why, Whose, Who. `What`, `It`, `Of`, `That` need a sentence of their own: see docstarts.tsv.
"""
import re,os,sys,argparse,collections
ap=argparse.ArgumentParser();ap.add_argument('--tree',required=True);ap.add_argument('--write',action='store_true');a=ap.parse_args()
cnt=collections.Counter()
for base in('crates','xtask','bench','fuzz','examples'):
    for d,ds,fs in os.walk(os.path.join(a.tree,base)):
        if 'target' in d.split(os.sep): continue
        for f in fs:
            if not f.endswith('.rs'): continue
            p=os.path.join(d,f);L=open(p).read().split('\n');ch=False;prev=False
            for i,l in enumerate(L):
                s=l.strip();isdoc=s.startswith('///') and not s.startswith('////')
                if isdoc and not prev:
                    m=re.match(r'(\s*/// )(Whether|Which|How|Where|When|Why|Whose|Who) (.*)$',l)
                    if m:
                        j=i
                        while j<len(L) and L[j].strip().startswith(('///','#[')): j+=1
                        head=' '.join(L[j:j+14]).split('{')[0].split(';')[0]
                        if re.match(r'\s*(pub(\([^)]*\))?\s+)?((const|async|unsafe|default)\s+)*fn\b',head) and '->' in head:
                            L[i]=f'{m.group(1)}Returns {m.group(2).lower()} {m.group(3)}';ch=True;cnt[m.group(2)]+=1
                prev=isdoc
            if ch and a.write: open(p,'w').write('\n'.join(L))
print(sum(cnt.values()),dict(cnt))
