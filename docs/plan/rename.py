#!/usr/bin/env python3
"""Applies lines of renames.tsv to a source tree, identifier by identifier.

usage: rename.py --tree ROOT [--tsv FILE] [--write] [--report FILE] CONCEPT...
       CONCEPT is the first column; `all` takes every concept in the order of the file.

Strings are never touched (metrics, JSON, problem codes, SQL, Lua, golden files stay as they are), but
for inline arguments of format strings, `"{old:?}"`, which are identifiers.
Comments are touched only inside backquotes, link targets and code fences (doctests), for types and
variants only. Without --write nothing is written; counts and collisions are printed.

Columns: concept, kind, old, new, crates-or-paths, note.  Kinds:
  type     struct, enum, trait or alias. Paths: `decl FILE` (then a list of files, for the reader).
           Names are resolved through `use`, re-exports and globs, so that another type of the same
           name, and variants, are left alone.
  variant  OLD is `Enum::Variant`, NEW the bare new name. Paths: `decl FILE` of the enum.
           `Enum::Variant`, `Self::Variant` in impls of the enum, the declaration.
  field    a field, parameter or local: each identifier OLD in the paths that is no call, no path
           segment, no module and not in a `use`.
  fieldof  OLD is `Struct.field`; paths: `decl FILE; recv a,b,c`. The declaration, literals and patterns of the
           struct (shorthand `x` becomes `new: x`), and `a.field`, `self.a.field`, `a.0.field` for the named
           receivers. What is left, the compiler names.
  method   OLD called after `.` or `Type::`, declared by `fn`, or at the end of a path.
  fn       a free function: called, declared, imported, passed.
  const    each identifier OLD in the paths.
  sub      a regular expression on the text of the files (code, comments and strings alike), with \\1 groups.
  module   OLD and NEW are files: the file and its folder are moved; `mod x`, `x::`, `use ..::x`.
  keep, manual   never applied: text for the reader.
Paths: globs, `;` between, `!` before what is left out, ALL for everything.
"""
import sys,re,os,collections,argparse
HERE=os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0,HERE)
from decl import toks
from resolve import Tree,CAMEL,variants,md_sites,fence_hits
def glob2re(g):
    r='';i=0
    while i<len(g):
        if g.startswith('**',i): r+='.*';i+=2
        elif g[i]=='*': r+='[^/]*';i+=1
        elif g[i]=='{':
            j=g.index('}',i);r+='(?:'+'|'.join(re.escape(x).replace(r'\*\*','.*').replace(r'\*','[^/]*') for x in g[i+1:j].split(','))+')';i=j+1
        else: r+=re.escape(g[i]);i+=1
    return re.compile('^'+r+'$')
def select(fs,spec):
    inc=[];exc=[]
    for p in spec.split(';'):
        p=p.strip()
        if not p: continue
        if p=='ALL': inc.append(re.compile('.*'))
        elif p.startswith('!'): exc.append(glob2re(p[1:]))
        else: inc.append(glob2re(p))
    return [f for f in fs if any(r.match(f) for r in inc) and not any(r.match(f) for r in exc)]
class Code:
    def __init__(s,tree):
        s.t=Tree(tree);s.root=tree;s.md={};s.dirty=set();s.moved={}
        cnt=collections.Counter(n for r in s.t.T if '/src/' in r for n in s.t.decl[r]);var=set()
        for r,t in s.t.T.items():
            c=[x for x in t if x[0] not in('com','blk')];v=variants(c)
            var|={x[1] for x in c if x[3] in v}
        s.t.orig_unique={n for n,k in cnt.items() if k==1}-var
        for d,ds,fs in os.walk(tree):
            if 'target' in d.split(os.sep) or '/.git' in d: continue
            for f in fs:
                r=os.path.relpath(os.path.join(d,f),tree)
                if f.endswith('.md') and f not in('CHANGELOG.md','VOCABULARY.md') and 'docs/plan' not in d: s.md[r]=open(os.path.join(d,f),encoding='utf8').read()
    def edit(s,rel,hits,new):
        tx=s.md[rel] if rel in s.md else s.t.text[rel]
        for a,b in sorted(set(hits),reverse=True): tx=tx[:a]+new+tx[b:]
        if rel in s.md: s.md[rel]=tx
        else: s.t.load(rel,tx);s.t.index_file(rel)
        s.dirty.add(rel)
    def impls(s,c):
        out=[];n=len(c);i=0
        while i<n:
            if c[i][1]=='impl' and (i==0 or c[i-1][1] in('}',';','{',']','unsafe')):
                j=i+1;a=0;last=None;wh=False;seg=[]
                while j<n and c[j][1]!='{':
                    y=c[j][1]
                    if y=='<':a+=1
                    elif y=='>':a-=1
                    elif y=='where':wh=True
                    elif a==0 and not wh:
                        if y=='for': last=None;seg=[]
                        elif c[j][0]=='id' and y not in('dyn','mut'): seg.append(y);last=y
                    j+=1
                d=1;k=j+1
                while k<n and d:
                    if c[k][1]=='{':d+=1
                    elif c[k][1]=='}':d-=1
                    k+=1
                out.append((j,k,seg))
            i+=1
        return out
    def variant(s,en,va,decl):
        target=(decl,en);out={}
        for rel,t in s.t.T.items():
            if va not in s.t.text[rel]: continue
            c=[x for x in t if x[0] not in('com','blk')];n=len(c);hits=[];im=None
            for i,(k,x,l,p) in enumerate(c):
                if k!='id' or x!=va: continue
                if i>=2 and c[i-1][1]=='::':
                    j=i-2
                    if c[j][1]=='>':
                        a=1;j-=1
                        while j>=0 and a:
                            if c[j][1]=='>':a+=1
                            elif c[j][1]=='<':a-=1
                            j-=1
                        if c[j][1]=='::': j-=1
                    q=c[j][1]
                    if q=='Self':
                        if im is None: im=s.impls(c)
                        for a,b,seg in im:
                            if a<i<b and seg and seg[-1]==en and s.t.path(rel,seg)==target: hits.append((p,p+len(va)));break
                    elif q==en or (q in s.t.imp[rel][0] and s.t.imp[rel][0][q][-1]==en):
                        segs=[q];j-=1
                        while j>0 and c[j][1]=='::' and c[j-1][0]=='id': segs.insert(0,c[j-1][1]);j-=2
                        if s.t.path(rel,segs)==target: hits.append((p,p+len(va)))
                elif rel==decl:
                    # declaration
                    if i and c[i-1][1] in('{',',',']') and s.declared_in(c,i,en): hits.append((p,p+len(va)))
            docs=[]
            for k,x,l,p in t:
                if k!='com': continue
                for m in re.finditer(r'((?:[A-Za-z_]\w*::)*)'+re.escape(en)+'::'+re.escape(va)+r'(?!\w)',x):
                    segs=[y for y in m.group(1).split('::') if y]+[en]
                    r=s.t.path(rel,segs)
                    if r==target or (r is None and s.t.crate[rel]==s.t.crate[decl] and s.t.unique(decl,en)):
                        docs.append((p+m.end()-len(va),p+m.end()))
                    elif r is None:
                        # a doctest with its own imports, or a link of another crate
                        if segs[0] in s.t.lib:
                            f=s.t.module(s.t.lib[segs[0]],['crate']+segs[1:-1])
                            if f and s.t.name(f,en)==target: docs.append((p+m.end()-len(va),p+m.end()))
                        elif len(segs)==1 and re.search(r'use hapax[\w:]*(?:::\{[^;]*\b|::)'+en+r'\b',s.t.text[rel]): 
                            docs.append((p+m.end()-len(va),p+m.end()))
            if hits or docs: out[rel]=(hits,docs)
        return out
    def declared_in(s,c,i,en):
        d=0;j=i-1
        while j>=0:
            y=c[j][1]
            if y in('}',')',']'):d+=1
            elif y in('{','(','['):
                if d==0 and y=='{':
                    k=j-1
                    while k>=0 and c[k][1] not in('enum',';','}','{'): k-=1
                    return k>=0 and c[k][1]=='enum' and c[k+1][1]==en
                d-=1
                if d<0: return False
            j-=1
        return False
    def plain(s,rel,kind,old):
        t=s.t.T[rel];c=[x for x in t if x[0] not in('com','blk')];n=len(c);out=[]
        use=set()
        if any(x[1]=='use' for x in c): 
            for path,a,pos in s.t.uses[rel]: use.add(pos)
        for i,(k,x,l,p) in enumerate(c):
            if k!='id' or x!=old: continue
            pv=c[i-1][1] if i else '';nx=c[i+1][1] if i+1<n else '';pp=c[i-2][1] if i>1 else ''
            if kind=='field':
                if nx=='(' and pv not in('pub',): continue
                if nx=='::' or (nx=='!' and i+2<n and c[i+2][1] in('(','[','{')) or pv in('::','fn','mod') or p in use: continue
            elif kind=='method':
                if not((nx=='(' and pv in('.','::','fn')) or (nx=='::' and pv=='.') or pv=='fn' or (pv=='::' and CAMEL.match(pp) and nx!='::')): continue
            elif kind=='fn':
                if pv=='.' or (pv=='::' and CAMEL.match(pp)): continue
                if not(nx=='(' or pv=='fn' or p in use or (nx=='::' and i+2<n and c[i+2][1]=='<') or (pv in('(',',') and nx in(')',','))): continue
            elif kind=='modseg':
                inuse=any(abs(p-q)<2000 for q in use) and s.in_use(c,i)
                if not(pv=='mod' or nx=='::' or inuse): continue
                if pv=='::' and CAMEL.match(pp): continue
                if pv=='.': continue
            out.append((p,p+len(old)))
        if kind=='field': out+=s.captured(c,old)
        return out
    def captured(s,c,old):
        """inline arguments of format strings: "{old}", "{old:?}" in macros and in #[error(..)]"""
        out=[];rx=re.compile(r'(?<!\{)\{'+old+r'(?=[:}])')
        for i,(k,x,l,p) in enumerate(c):
            if k not in('str','raw') or not rx.search(x): continue
            d=0;j=i-1
            while j>=0:
                y=c[j][1]
                if y in(')',']','}'):d+=1
                elif y in('(','[','{'):
                    if d==0: break
                    d-=1
                j-=1
            if j>0 and c[j][1]=='(' and (c[j-1][1]=='!' or c[j-1][1]=='error'):
                for m in rx.finditer(x): out.append((p+m.start()+1,p+m.end()))
        return out
    def fieldof(s,st,fi,decl,recv,only=None):
        target=(decl,st);out={}
        for rel,t in s.t.T.items():
            tx=s.t.text[rel]
            if fi not in tx: continue
            c=[x for x in t if x[0] not in('com','blk')];n=len(c);hits=[];short=[]
            lits=[]
            im=None
            for i,(k,x,l,p) in enumerate(c):
                if k=='id' and (x==st or x=='Self') and i+1<n and c[i+1][1]=='{' and not(i and c[i-1][1] in('impl','trait','enum','for','dyn')):
                    segs=[x];j=i-1
                    while j>0 and c[j][1]=='::' and c[j-1][0]=='id': segs.insert(0,c[j-1][1]);j-=2
                    isdecl=c[i-1][1]=='struct' if i else False
                    if x=='Self':
                        if im is None: im=s.impls(c)
                        seg=next((sg for a,b,sg in im if a<i<b),None)
                        if not seg or s.t.path(rel,seg)!=target: continue
                    elif s.t.path(rel,segs)!=target: continue
                    if not isdecl and i and c[i-1][1] in('->',) : continue
                    if i+1<n and isdecl is False and x==st and i and c[i-1][1]=='->': continue
                    d=1;q=i+2
                    while q<n and d:
                        y=c[q][1]
                        if y in('{','(','['):d+=1
                        elif y in('}',')',']'):d-=1
                        elif d==1 and c[q][0]=='id' and y==fi and c[q-1][1] in('{',',','pub',')',']','ref','mut'):
                            if c[q+1][1]==':': hits.append((c[q][3],c[q][3]+len(fi)))
                            elif c[q+1][1] in(',','}'): short.append((c[q-1][3] if c[q-1][1] in('ref','mut') else c[q][3]))
                        q+=1
                if k=='id' and x==fi and i>=2 and c[i-1][1]=='.' and not(i+1<n and c[i+1][1]=='('):
                    r=c[i-2][1]
                    if r in recv: hits.append((p,p+len(fi)))
            if hits or short: out[rel]=(hits,short)
        return out
    def owners(s,hits,old):
        """the types that declare a renamed method or field: {(file, type)}"""
        out=set()
        for rel,h in hits.items():
            if rel not in s.t.T: continue
            pos={a for a,b in h};c=[x for x in s.t.T[rel] if x[0] not in('com','blk')];n=len(c);im=None
            for i,(k,x,l,p) in enumerate(c):
                if p not in pos or x!=old: continue
                if c[i-1][1]=='fn':
                    if im is None: im=s.impls(c)
                    for a,b,seg in im:
                        if a<i<b and seg:
                            r=s.t.path(rel,seg)
                            if r: out.add(r)
                    j=i;d=0
                    while j>=0:
                        if c[j][1]=='}':d+=1
                        elif c[j][1]=='{':
                            if d==0: break
                            d-=1
                        j-=1
                    while j>=0 and c[j][1] not in('trait',';','}'): j-=1
                    if j>=0 and c[j][1]=='trait': out.add((rel,c[j+1][1]))
                elif i+1<n and c[i+1][1]==':' and c[i-1][1] in('{',',','pub',')',']'):
                    j=i;d=0
                    while j>=0:
                        if c[j][1] in('}',')'):d+=1
                        elif c[j][1] in('{','('):
                            if d==0: break
                            d-=1
                        j-=1
                    while j>=0 and c[j][1] not in('struct',';','}'): j-=1
                    if j>=0 and c[j][1]=='struct': out.add((rel,c[j+1][1]))
        return out
    def doclinks(s,owners,old,new):
        """`Type::old` in comments, where Type is one of the owners"""
        out={}
        names={n for f,n in owners}
        for rel in list(s.t.T)+list(s.md):
            tx=s.md[rel] if rel in s.md else s.t.text[rel]
            if old not in tx: continue
            h=[]
            def look(x,p):
                for m in re.finditer(r'((?:[A-Za-z_]\w*::)*)([A-Z]\w*|Self)::'+old+r'(?!\w)',x):
                    segs=[y for y in m.group(1).split('::') if y]+[m.group(2)]
                    if rel in s.md:
                        r=None
                        if segs[0] in s.t.lib:
                            f=s.t.module(s.t.lib[segs[0]],['crate']+segs[1:-1]);r=s.t.name(f,segs[-1]) if f else None
                        elif segs[0]=='crate':
                            o=next(iter(owners));f=s.t.module(o[0],segs[:-1]);r=s.t.name(f,segs[-1]) if f else None
                        if r in owners: h.append((p+m.end()-len(old),p+m.end()))
                        continue
                    r=s.t.path(rel,segs) if segs!=['Self'] else None
                    if segs==['Self']:
                        if any(f==rel for f,n in owners): h.append((p+m.end()-len(old),p+m.end()))
                    elif r in owners or (r is None and any(n==segs[-1] and s.t.crate[f]==s.t.crate[rel] for f,n in owners)) or (r is None and segs[0] in s.t.lib and s.t.name(s.t.module(s.t.lib[segs[0]],['crate']+segs[1:-1]) ,segs[-1]) in owners):
                        h.append((p+m.end()-len(old),p+m.end()))
            if rel in s.md: look(tx,0)
            else:
                for k,x,l,p in s.t.T[rel]:
                    if k=='com': look(x,p)
            if h: out[rel]=h
        return out
    def in_use(s,c,i):
        j=i
        while j>=0:
            y=c[j][1]
            if y in(';','}') and c[j][1]==';': return False
            if y=='use': return True
            if c[j][0]!='id' and y not in('::','{',',','*','}'): return False
            j-=1
        return False
    def write(s):
        for r in sorted(s.dirty):
            tx=s.md.get(r) if r in s.md else s.t.text.get(r)
            if tx is None: continue
            p=os.path.join(s.root,r);os.makedirs(os.path.dirname(p),exist_ok=True)
            open(p,'w',encoding='utf8').write(tx)
        for o in s.moved:
            if os.path.exists(os.path.join(s.root,o)): os.remove(os.path.join(s.root,o))
def load(tsv):
    rows=[]
    for l in open(tsv,encoding='utf8'):
        l=l.rstrip('\n')
        if not l or l.startswith('#') or l.startswith('concept\t'): continue
        f=l.split('\t');assert len(f)==6,(len(f),l)
        rows.append(f)
    return rows
def shorten(r): return r
def run(code,rows,out=print):
    """applies rows; returns [(row, hits, files, collisions)]"""
    res=[]
    for row in rows:
        con,kind,old,new,paths,note=row
        if kind in('keep','manual'): res.append((row,0,{},[]));continue
        rs=[r for r in code.t.T];hitmap={};newname=new.split('::')[-1]
        if kind in('type','variant'):
            m=re.match(r'decl (\S+)',paths);assert m,row
            decl=m.group(1)
            if decl not in code.t.T: out(f'!! {con}: {old}: no file {decl}');res.append((row,0,{},[]));continue
            if kind=='type':
                if old not in code.t.decl[decl]: out(f'!! {con}: {old} is not declared in {decl}');res.append((row,0,{},[]));continue
                st=code.t.sites((decl,old))
                mds={r:md_sites(code.t,tx,(decl,old)) for r,tx in code.md.items()}
            else:
                en,va=old.split('::');st=code.variant(en,va,decl);mds={}
                for r,tx in code.md.items():
                    mds[r]=[(x.end()-len(va),x.end()) for x in re.finditer(r'\b'+en+'::'+va+r'\b',tx)]
            hitmap={r:(h,d) for r,(h,d) in st.items()}
            for r,h in mds.items():
                if h: hitmap[r]=([],h)
        elif kind=='sub':
            tot=0;fl={}
            for r in select(rs+list(code.md),paths):
                tx=code.md[r] if r in code.md else code.t.text[r]
                tx2,k=re.subn(old,new,tx)
                if k:
                    tot+=k;fl[r]=k;code.dirty.add(r)
                    if r in code.md: code.md[r]=tx2
                    else: code.t.load(r,tx2);code.t.index_file(r)
            out(('!! ZERO ' if tot==0 else '')+f"{con}: sub {old} -> {new}: {tot} in {len(fl)} files");res.append((row,tot,fl,[]));continue
        elif kind=='fieldof':
            m=re.match(r'decl (\S+?);? recv (\S*)',paths);st,fi=old.split('.')
            o=code.fieldof(st,fi,m.group(1),set(x for x in m.group(2).split(',') if x))
            tot=0;fl={};coll=[]
            for r,(h,sh) in o.items():
                tx=code.t.text[r]
                ed=[(a,b,new) for a,b in h]+[(a,a,new+': ') for a in sh]
                for a,b,x in sorted(set(ed),reverse=True): tx=tx[:a]+x+tx[b:]
                code.t.load(r,tx);code.t.index_file(r);code.dirty.add(r);fl[r]=len(ed);tot+=len(ed)
            out(('!! ZERO ' if tot==0 else '')+f"{con}: fieldof {old} -> {new}: {tot} in {len(fl)} files");res.append((row,tot,fl,coll));continue
        elif kind=='module':
            ob=os.path.splitext(os.path.basename(old))[0];nb=os.path.splitext(os.path.basename(new))[0]
            if old not in code.t.T: out(f'!! {con}: no file {old}');res.append((row,0,{},[]));continue
            tot=0;fl={}
            for r in select(rs,paths):
                h=code.plain(r,'modseg',ob)
                d=[]
                for k,x,l,p in code.t.T[r]:
                    if k=='com':
                        for m in re.finditer(r'\b'+ob+r'(?=::[A-Za-z_])|(?<![A-Za-z_:])(?:[a-z_]\w*::)+(?P<x>'+ob+r')(?=[`\])])|(?<=\[`)'+ob+r'(?=`\])',x): d.append((p+m.start('x'),p+m.end('x')) if m.group('x') else (p+m.start(),p+m.end())) #d.append((p+m.start(),p+m.end()))
                if h or d: fl[r]=len(h);tot+=len(h);code.edit(r,h+d,nb)
            for r in list(code.md):
                d=[(m.start(),m.end()) for m in re.finditer(r'(?<=::)'+ob+r'(?=::)',code.md[r])]
                if d and select([r],paths): code.edit(r,d,nb)
            od,nd=os.path.splitext(old)[0],os.path.splitext(new)[0]
            if od.endswith('/mod'): od=os.path.dirname(old);nd=os.path.dirname(new)
            for o in [old]+[x for x in rs if x.startswith(od+'/') and x!=old]:
                nn=new if o==old else nd+o[len(od):]
                if nn in code.t.T: out(f'!! {con}: {nn} exists');
                code.t.text[nn]=code.t.text.pop(o);code.t.T[nn]=code.t.T.pop(o);code.dirty.discard(o);code.dirty.add(nn);code.moved[o]=nn
                code.t.decl.pop(o,None);code.t.uses.pop(o,None);code.t.imp.pop(o,None)
            code.t.index()
            res.append((row,tot,fl,[]));out(f'{con}: module {old} -> {new}: {tot} segments in {len(fl)} files');continue
        else:
            for r in select(rs,paths):
                if kind=='const':
                    h=[(p,p+len(old)) for k,x,l,p in code.t.T[r] if k=='id' and x==old]
                else: h=code.plain(r,kind,old)
                if h: hitmap[r]=(h,[])
        coll=[];fl={}
        for r,(h,d) in hitmap.items():
            if r in code.t.T and h:
                ex=sum(1 for x in code.t.T[r] if x[0]=='id' and x[1]==newname)
                if ex: coll.append(f'{r}:{ex}')
            fl[r]=len(h)+len(d)
        tot=sum(len(h) for h,d in hitmap.values())
        if kind in('method','field','fn'):
            ow=code.owners({r:h for r,(h,d) in hitmap.items()},old)
            if ow:
                for r,d in code.doclinks(ow,old,newname).items():
                    h0=hitmap.get(r,([],[]));hitmap[r]=(h0[0],h0[1]+d);fl[r]=fl.get(r,0)+len(d)
        for r,(h,d) in hitmap.items(): code.edit(r,h+d,newname)
        out(('!! ZERO ' if tot==0 else '')+f"{con}: {kind} {old} -> {new}: {tot} in {len(fl)} files"+(f"  NEW EXISTS {coll[:10]}" if coll else ''))
        res.append((row,tot,fl,coll))
    return res
def shadows(code,names):
    """free calls `name(` in files where `name` is a local, parameter or pattern as well"""
    out=[]
    for rel,t in code.t.T.items():
        tx=code.t.text[rel]
        c=None
        for nm in names:
            if nm not in tx: continue
            if c is None: c=[x for x in t if x[0] not in('com','blk')]
            calls=[];locs=[]
            for i,(k,x,l,p) in enumerate(c):
                if k!='id' or x!=nm: continue
                pv=c[i-1][1] if i else '';nx=c[i+1][1] if i+1<len(c) else ''
                if nx=='(' and pv not in('.','::','fn'): calls.append(l)
                elif nx!='(' and pv not in('.','::','fn','mod') and (pv in('let','mut','ref','(',',','|','{','&') or nx==':'): locs.append(l)
            if calls and locs: out.append((nm,rel,calls[:12],locs[:12]))
    return out
if __name__=='__main__':
    ap=argparse.ArgumentParser();ap.add_argument('--tree',required=True);ap.add_argument('--tsv',default=os.path.join(HERE,'renames.tsv'))
    ap.add_argument('--write',action='store_true');ap.add_argument('concepts',nargs='+')
    a=ap.parse_args()
    rows=[r for r in load(a.tsv) if a.concepts==['all'] or r[0] in a.concepts]
    code=Code(a.tree);run(code,rows)
    new={r[3].split('::')[-1] for r in rows if r[1] in('field','fieldof','fn','method')}
    for nm,rel,cl,lo in shadows(code,new): print(f'?? shadow: {nm} in {rel}: called at {cl}, local at {lo}')
    if a.write: code.write()
